#!/usr/bin/env bash
# Runs one audit with the inputs of action.yml, and names the reports in its outputs.
set -euo pipefail

# Append OPTION LINE for each line of a text that is not empty. `=` keeps a value that begins with a dash a value.
arguments=()
each() {
  local option=$1 line
  while IFS= read -r line; do
    if [[ -n $line ]]; then arguments+=("$option=$line"); fi
  done <<<"$2"
}

# A line feed would put lines of its own into the step's outputs.
if [[ $INPUT_REPORTS == *$'\n'* ]]; then
  echo "reports: expected one folder, found a name of several lines" >&2
  exit 2
fi
mkdir -p -- "$INPUT_REPORTS"
reports=$(cd -- "$INPUT_REPORTS" && pwd)
for kind in sarif junit html json; do
  case $kind in
    junit) file=$reports/safeload.xml ;;
    *) file=$reports/safeload.$kind ;;
  esac
  arguments+=("--$kind=$file")
  printf '%s=%s\n' "$kind" "$file" >>"$GITHUB_OUTPUT"
done

each --manifest "$INPUT_MANIFESTS"
each --trust "$INPUT_TRUST"
each --policy "$INPUT_POLICY"
each --baseline "$INPUT_BASELINE"
each --fail-on "$INPUT_FAIL_ON"
arguments+=(--github --)
while IFS= read -r line; do
  if [[ -n $line ]]; then arguments+=("$line"); fi
done <<<"$INPUT_CHECKPOINTS"

# What is printed is kept as well, for its last line: the verdict.
code=0
"$RUNNER_TEMP/safeload/bin/safeload" audit "${arguments[@]}" | tee "$RUNNER_TEMP/safeload.txt" || code=$?
printf 'verdict=%s\n' "$(tail -n 1 "$RUNNER_TEMP/safeload.txt")" >>"$GITHUB_OUTPUT"
exit "$code"
