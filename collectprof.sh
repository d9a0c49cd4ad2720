. /tmp/tests/env.sh
time $PY -m pytest -q -p no:cacheprovider --collect-only -m "not slow and not interpreter and not exhaustive" > /tmp/tests/collect.out
