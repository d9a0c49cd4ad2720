"""Train the tiny Llama model that ships in core/assets/tiny_llama on text that ships with Python itself.

The command is `python tools/train_tiny_llama.py`; it prints the figures that the README of the model records.
"""

import argparse
import ast
import hashlib
import json
import math
import platform
import re
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

END = "<|endoftext|>"
VOCAB, WINDOW, CONTEXT = 2048, 256, 512
SKIPPED_FOLDERS = {"test", "tests", "idle_test", "site-packages", "__pycache__"}
NOTICE = re.compile(r"copyright|all rights reserved|warrant(y|ies)|licen[cs]e|\S@\S+\.\S", re.IGNORECASE)
PROMPTS = ("The Python interpreter is", "If the argument is", "Return a list of", "This module provides")


def clean(text: str, seen: set[str], least_words: int = 4) -> str:
    """Keep the prose paragraphs of a text that have not been seen before, each on one line."""
    kept = []
    for block in re.split(r"\n\s*\n", text):
        line = re.sub(r"([*`])\1", "", " ".join(block.split()))
        letters = sum(char.isalpha() or char == " " for char in line)
        if len(line.split()) < least_words or letters < 0.8 * len(line) or not line.isascii():
            continue
        if ">>>" in line or re.search(r"[-=#*_~.]{4}", line) or NOTICE.search(line) or line.lower() in seen:
            continue
        seen.add(line.lower())
        kept.append(line)
    return "\n\n".join(kept)


def source_texts(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the docstrings and the comment blocks of one source file, each with its least number of words."""
    source = path.read_text(encoding="utf-8", errors="replace")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or "", 4
    for block in re.findall(r"(?:^[ \t]*#.*\n){2,}", source, re.MULTILINE):
        yield re.sub(r"^[ \t]*#+!?", "", block, flags=re.MULTILINE), 10


def collect_documents(join: int) -> list[str]:
    """Collect the cleaned texts of the topics and the library in order, joined up to the given length."""
    library = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(path.relative_to(library) for path in library.rglob("*.py"))
    seen: set[str] = set()
    texts = [clean(topics[name], seen) for name in sorted(topics)]
    for path in paths:
        if SKIPPED_FOLDERS.isdisjoint(path.parts):
            texts += [clean(text, seen, words) for text, words in source_texts(library / path)]
    documents: list[str] = []
    for text in filter(None, texts):
        if documents and len(documents[-1]) < join:
            documents[-1] += f"\n\n{text}"
        else:
            documents.append(text)
    return documents


def split_documents(documents: list[str]) -> tuple[list[str], list[str]]:
    """Split the documents into a training part and a held-out part of about one in twenty, by their digests."""
    parts: tuple[list[str], list[str]] = ([], [])
    for document in documents:
        parts[hashlib.sha256(document.encode()).digest()[0] < 13].append(document)
    return parts


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """Train a byte-level BPE tokenizer that starts every text with the document separator."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(documents, trainer)
    template = processors.TemplateProcessing(single=f"{END} $A", pair=f"{END} $A {END} $B", special_tokens=[(END, 0)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def make_config() -> LlamaConfig:
    """Make the configuration of the model."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    )


def batches(encoded: list[torch.Tensor], size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield batches of windows without end, with the documents in a new order in each epoch."""
    while True:
        order = torch.randperm(len(encoded), generator=generator).tolist()
        stream = torch.cat([encoded[index] for index in order])
        windows = stream[: len(stream) // (WINDOW + 1) * (WINDOW + 1)].view(-1, WINDOW + 1)
        windows = windows[torch.randperm(len(windows), generator=generator)]
        yield from windows[: len(windows) // size * size].split(size)


def loss_of(model: LlamaForCausalLM, windows: torch.Tensor) -> torch.Tensor:
    """Compute the mean next-token cross-entropy over a batch of windows."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, encoded: list[torch.Tensor], window: int = WINDOW) -> float:
    """Compute the mean loss over all whole windows of the held-out documents."""
    stream = torch.cat(encoded)
    windows = stream[: len(stream) // (window + 1) * (window + 1)].view(-1, window + 1)
    losses = [loss_of(model, batch) * len(batch) for batch in windows.split(16)]
    return float(sum(losses) / len(windows))


def learning_rate(step: int, options: argparse.Namespace) -> float:
    """Compute the learning rate of one step: linear warm-up, then a cosine down to a fiftieth of the peak."""
    if step < options.warmup:
        return options.rate * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def train(model: LlamaForCausalLM, parts: list[list[torch.Tensor]], options: argparse.Namespace) -> float:
    """Train the model in place and return the mean training loss of the last hundred steps."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    source = batches(parts[0], options.batch, torch.Generator().manual_seed(options.seed))
    losses: list[float] = []
    start = time.monotonic()
    for step in range(options.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, next(source))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % options.report == 0:
            rate = (step + 1) * options.batch * WINDOW / (time.monotonic() - start)
            mean, held_out = sum(losses[-100:]) / len(losses[-100:]), held_out_loss(model, parts[1])
            print(f"step {step + 1} loss {mean:.4f} held-out {held_out:.4f} tokens/s {rate:.0f}", flush=True)
    return sum(losses[-100:]) / len(losses[-100:])


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model folder, with the weights rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    del weights["lm_head.weight"]  # tied to the embedding
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    model.config.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    settings |= {"model_max_length": CONTEXT, "clean_up_tokenization_spaces": False}
    generation = {"bos_token_id": 0, "eos_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def samples(folder: Path, least: int) -> str:
    """Continue the prompts greedily by at least so many tokens with the saved model, as a Markdown list."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    lines = []
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**inputs, min_new_tokens=least, max_new_tokens=40, do_sample=False, pad_token_id=0)[0]
        text = tokenizer.decode(output[inputs["input_ids"].shape[1] :]).replace("\n", "\\n")
        lines.append(f"- **{prompt}**`{text}`")
    return "\n".join(lines)


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("core/assets/tiny_llama"))
    for name, default in (
        ("steps", 2000),
        ("batch", 16),
        ("warmup", 100),
        ("report", 100),
        ("threads", 2),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--join", type=int, default=0, help="join neighbouring texts up to this many characters")
    parser.add_argument("--rate", type=float, default=3e-3)
    return parser.parse_args()


def main() -> None:
    """Train, save and check the model, and print the figures that its README records."""
    options, start = parse_options(), time.monotonic()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    documents = collect_documents(options.join)
    corpus = f"\n{END}\n".join(documents)
    print(f"python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"{len(documents)} documents, {len(corpus)} characters, sha256 {hashlib.sha256(corpus.encode()).hexdigest()}")
    split = split_documents(documents)
    tokenizer = train_tokenizer(split[0])
    parts = [[torch.tensor(code.ids) for code in tokenizer.encode_batch(part)] for part in split]
    tokens = [sum(map(len, part)) for part in parts]
    print(f"{tokens=}, epochs {options.steps * options.batch * WINDOW / tokens[0]:.1f}, {options}", flush=True)
    model = LlamaForCausalLM(make_config())
    train_loss = train(model, parts, options)
    save(model, tokenizer, options.out)
    saved = AutoModelForCausalLM.from_pretrained(options.out, dtype=torch.float32, local_files_only=True)
    losses = [held_out_loss(saved, parts[1], window) for window in (WINDOW, CONTEXT)]
    print(f"parameters {saved.num_parameters()}, minutes {(time.monotonic() - start) / 60:.1f}, {train_loss=:.4f}")
    print(f"saved weights in float32: held-out {losses[0]:.4f}, perplexity {math.exp(losses[0]):.2f}")
    print(f"held-out with windows of {CONTEXT} tokens {losses[1]:.4f}")
    print(samples(options.out, 0), samples(options.out, 40), sep="\n\n")


if __name__ == "__main__":
    main()
