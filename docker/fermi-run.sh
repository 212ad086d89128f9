#!/bin/sh
# Runs the image fermion:fermi with the host's card: its device files, and the three libraries of its driver.
#   docker/fermi-run.sh [MODEL_DIRECTORY [ARGUMENTS OF fermion serve]]
# DOCKER=echo shows the command instead. LIBRARIES names the directory of the driver's libraries if ldconfig does not
# know them. The address is 127.0.0.1:8000; PORT names another port.
set -eu

docker=${DOCKER:-docker}
set -- "${1:-}" "$@"
model=$1
shift
[ $# -eq 0 ] || shift

# Where a library of the driver lies: LIBRARIES, or what the loader's cache says.
library() {
    if [ -n "${LIBRARIES:-}" ]; then
        found=$LIBRARIES/$1
    else
        found=$(ldconfig -p 2>/dev/null | awk -v name="$1" '$1 == name && /x86-64/ { print $NF; exit }')
    fi
    [ -n "$found" ] && [ -e "$found" ] || return 1
    readlink -f "$found"
}

binds=
for name in libcuda.so.1 libnvidia-ptxjitcompiler.so.1 libnvidia-fatbinaryloader.so.390.157; do
    if path=$(library "$name"); then
        binds="$binds --volume $path:/driver/$name:ro"
    elif [ "$name" != libnvidia-fatbinaryloader.so.390.157 ]; then # newer drivers have none
        echo "fermi-run.sh: $name is not on this machine; install the driver (docs/fermi.md) or set LIBRARIES" >&2
        exit 2
    fi
done

devices=
for device in /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia[0-9]*; do
    [ ! -e "$device" ] || devices="$devices --device $device"
done

if [ -n "$model" ]; then
    binds="$binds --volume $(readlink -f "$model"):/model:ro"
    set -- serve /model "$@"
fi
# Word splitting is meant: the lists hold options without blanks.
# shellcheck disable=SC2086
exec "$docker" run --rm --init --ulimit memlock=-1 $devices $binds --volume fermion-home:/var/lib/fermion \
    --publish "127.0.0.1:${PORT:-8000}:8000" fermion:fermi "$@"
