#!/bin/sh
# Makes the cache of limits that runs with WINDLASS_CACHE find, by the product: `windlass tune` of four ranks on the simulator, whose clock says
# which size is the last one faster than NCCL's: of all-gathers none, of broadcasts 128 KiB, of all others 32 KiB.
# Usage: measured_limits.sh LIBRARY CACHE   LIBRARY: Windlass's, beside which the command lies
set -eu
rm -rf "$2"
export WINDLASS_CACHE="$2" WINDLASS_SIM_CLOCK=nccl=20:100,windlass=10:5,windlass.all_gather=10:2.5,windlass.broadcast=10:20
windlass=$(dirname "$(readlink -f "$1")")/windlass
"$windlass" tune --sim --ranks 4 --sizes 32K,128K --repeat 5 --seconds 0.00001 --beside 0 >"$2.log" 2>&1 || { cat "$2.log"; exit 1; }
shown=$("$windlass" tune --sim --show --ranks 4)
for limit in all_reduce=32K reduce=32K all_gather=none broadcast=128K uneven_all_gather=32K; do
  echo "$shown" | grep -Eq "^${limit%=*} +${limit#*=} cache$" || { echo "$limit is not in the cache"; echo "$shown"; exit 1; }
done
