#!/bin/bash
# One boot, one pytest process: starting Python takes seconds under emulation, and each plug-in more.
cd "$(dirname "${BASH_SOURCE[0]}")/../../.." || exit 1
. lab/rdma_vm/guest/links.sh
export MOONCAKE_RXE_LAB=1 PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
mapfile -t arguments < /run/out/arguments
python -m pytest -p pytest_asyncio.plugin -p pytest_timeout -p no:cacheprovider --timeout=600 \
    --junitxml=/run/out/junit.xml "${arguments[@]}"
code=$?
dmesg | grep -iE 'rxe|oops|bug:|warn' | tail -n 5
exit $code
