#!/bin/sh
# Print the Python that the virtual environment is made with; say in one line, and fail, where there is none.
#     sh tools/choose_python.sh          python3, or if that can't be used the newest tested Python on PATH
#     sh tools/choose_python.sh NAME     this one and no other
tested="3.13 3.12 3.11" # as the classifiers of pyproject.toml say
needs="core needs Python 3.11 or newer (tested: 3.11, 3.12, 3.13)"

# Set `defect` to why a command can't be used, and `version` to its version; succeed if it can.
look() {
  defect="not there"
  version="$("$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null)" || return 1
  defect="Python $version"
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || return 1
  defect="Python $version without the modules venv and ensurepip (Debian, Ubuntu: apt install python${version%.*}-venv)"
  "$1" -c 'import ensurepip, venv' 2>/dev/null
}

name="${1:-python3}"
if look "$name"; then
  case " $tested " in *" ${version%.*} "*) ;; *) echo "== $name is Python $version, which nobody tested core with" >&2 ;; esac
  echo "$name"
  exit 0
fi
first="$defect"
if [ -n "${1:-}" ]; then
  echo "error: $needs; $name is $first" >&2
  exit 1
fi
for each in $tested; do
  if look "python$each"; then
    echo "== python3 is $first: using python$each ($version)" >&2
    echo "python$each"
    exit 0
  fi
done
echo "error: $needs; python3 is $first, and no other is on PATH; name one: make PYTHON=/path/to/python3.12" >&2
exit 1
