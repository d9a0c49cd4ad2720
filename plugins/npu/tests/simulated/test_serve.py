"""`core serve --device npu` on the real torch_npu: a stream has the tokens of the engine without a server."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs the extra 'hf'")
pytest.importorskip("httpx", reason="needs the extra 'dev'")
pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("uvicorn", reason="needs the extra 'serve'")

from tests.served import check_streams_of


@pytest.mark.slow
def test_a_stream_has_the_tokens_of_the_engine_alone(tmp_path: Path) -> None:
    check_streams_of("npu", tmp_path, os.environ, modes={"decode": "full", "prefill": "piecewise"})
