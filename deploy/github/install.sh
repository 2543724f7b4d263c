#!/usr/bin/env bash
# Installs the safeload that lies beside this script into an environment of its own, for action.yml.
set -euo pipefail

python=""
for candidate in python3.13 python3.12 python3.11 python3; do
  if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [[ -z $python ]]; then
  echo "::error::safeload needs Python 3.11 or newer; add actions/setup-python before this step" >&2
  exit 2
fi

if [[ -n $INPUT_EXTRAS && ! $INPUT_EXTRAS =~ ^[a-z0-9]+(,[a-z0-9]+)*$ ]]; then
  echo "::error::extras: expected names separated by commas, such as blake3" >&2
  exit 2
fi
"$python" -m venv "$RUNNER_TEMP/safeload"
# The path of the package is the action's own, checked out at the commit that the workflow names.
"$RUNNER_TEMP/safeload/bin/python" -m pip install --quiet --disable-pip-version-check \
  "$GITHUB_ACTION_PATH${INPUT_EXTRAS:+[$INPUT_EXTRAS]}"
