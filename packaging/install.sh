#!/bin/sh
# Installs Windlass from this folder, or a newer one over an older one. Nothing is compiled, and no NCCL is replaced.
# Usage: ./install.sh --prefix /opt/windlass
set -eu
usage() {
  sed -n '2,3s/^# //p' "$0" >&2
  exit 2
}
case ${1:-} in
  --prefix) [ $# = 2 ] || usage; prefix=$2 ;;
  --prefix=*) [ $# = 1 ] || usage; prefix=${1#--prefix=} ;;
  *) usage ;;
esac
case $prefix in
  *[\ :]*)
    echo "$prefix: the loader takes no preload whose path has a space or a colon: choose another folder" >&2
    exit 1
    ;;
  /*) ;;
  "") usage ;;
  *) prefix=$PWD/$prefix ;;
esac
here=$(cd "$(dirname "$0")" && pwd)
case $(uname -sm) in
  "Linux x86_64") ;;
  *) echo "Windlass runs on Linux on x86-64 only; this is $(uname -sm)" >&2; exit 1 ;;
esac

umask 022
cd "$here"
find bin include lib share ! -type d | while IFS= read -r file; do
  mkdir -p "$prefix/$(dirname "$file")"
  # A file in use is replaced as a whole, never written over: a process that has the library mapped would crash.
  cp -P "$file" "$prefix/$file.new"
  mv -f "$prefix/$file.new" "$prefix/$file"
done
echo "Windlass is in $prefix. Try: $prefix/bin/windlass doctor"
