#!/bin/sh
# An example of a site's burn-in test, for `burn_in: {command: [/etc/racktwin/dcgm-diag.sh, "{host}"]}`: DCGM's own
# diagnosis of all GPUs of a node, over ssh. Exit 0 is a passed test, 1 a failed one, 126 means not tested.
# What DCGM prints and how it ends differ between its versions: try it on a good and on a bad node of yours first.
#   dcgm-diag.sh HOST [LEVEL]     level 1: seconds, 2: minutes, 3: half an hour, 4: hours
set -u
host=${1:?a host}
level=${2:-3}

if ! command -v ssh >/dev/null; then
    echo "no ssh here"
    exit 126
fi
said=$(ssh -o BatchMode=yes -o ConnectTimeout=10 -- "$host" dcgmi diag -r "$level" -j 2>&1)
code=$?
printf '%s\n' "$said"

# Exit codes of ssh itself, or of a shell without dcgmi: the node was not tested.
case $code in
255 | 126 | 127)
    exit 126
    ;;
esac
# "Fail" anywhere in the output is a failed test, whatever the exit code; "Warn" needs a person.
if printf '%s' "$said" | grep -Eq '"Fail"'; then
    exit 1
fi
if printf '%s' "$said" | grep -Eq '"Pass"' && ! printf '%s' "$said" | grep -Eq '"Warn"' && [ "$code" -eq 0 ]; then
    exit 0
fi
echo "neither passed nor failed (exit $code)"
exit 126
