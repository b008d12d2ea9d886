#!/usr/bin/env bash
# Configuring on a machine without cmocka: a build without tests, unless they are asked
# for. And the fuzz targets without MPI, of which they have no use.
#
#   test_configure.sh SOURCE_FOLDER
set -euo pipefail
source=$1
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

# A pkg-config that does not know cmocka.
cat >"$root/pkg-config" <<'EOF'
#!/bin/sh
case "$*" in *cmocka*) echo "Package cmocka was not found" >&2; exit 1 ;; esac
exec pkg-config "$@"
EOF
chmod +x "$root/pkg-config"

configure() {
    cmake -G Ninja -S "$source" -B "$root/build" -DPKG_CONFIG_EXECUTABLE="$root/pkg-config" \
        -DSTILL_MPI=OFF "$@" >"$root/log" 2>&1
}
says() { grep -q "$1" "$root/log" || { cat "$root/log" >&2; exit 1; }; }
configure || { cat "$root/log" >&2; exit 1; }
says 'cmocka is not installed: building without tests'
if configure -DSTILL_TESTS=ON; then
    echo "STILL_TESTS=ON configures without cmocka" >&2
    exit 1
fi
says 'required package'
says cmocka
if command -v clang >/dev/null; then
    rm -rf "$root/build"
    configure -DCMAKE_C_COMPILER=clang -DSTILL_FUZZ=ON -DSTILL_MPI=AUTO \
        -DCMAKE_DISABLE_FIND_PACKAGE_MPI=ON || { cat "$root/log" >&2; exit 1; }
fi
echo "configured without cmocka"
