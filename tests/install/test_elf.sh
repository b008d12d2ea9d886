#!/usr/bin/env bash
# What the linker wrote into our binaries, as the dynamic linker reads it.
#
#   test_elf.sh FILE_OR_FOLDER ...     every ELF program and shared library in them
#
# An element of RUNPATH that is empty or relative means the current directory: a library
# that lies beside a downloaded model would run in place of the system's.
set -euo pipefail

binaries() { # every ELF program and shared library under the arguments
    local f
    find "$@" -name CMakeFiles -prune -o -type f \( -perm -u+x -o -name '*.so*' \) -print |
        while read -r f; do
            if [ "$(head -c 4 "$f" | tr -d '\0')" = $'\177ELF' ]; then echo "$f"; fi
        done
}

check_search_path() { # FILE DYNAMIC_SECTION
    local element path
    while read -r path; do
        while read -r -d : element; do
            case $element in
            /* | '$ORIGIN' | '$ORIGIN/'*) ;;
            *) fail "$1: its search path '$path' has the element '$element'" ;;
            esac
        done <<<"$path:"
    done < <(sed -n 's/.*(R\(UN\)\?PATH).*\[\(.*\)\]$/\2/p' <<<"$2")
}

# MPI is needed by its module alone, so that still runs where MPI is not installed.
check_libraries() { # FILE DYNAMIC_SECTION
    local of_mpi
    of_mpi=$(grep -E 'NEEDED.*\[lib(mpi|open-(rte|pal)|pmi)' <<<"$2" || true)
    case $1 in
    */libstill-mpi.so) [ -n "$of_mpi" ] || fail "$1 does not link MPI" ;;
    *) [ -z "$of_mpi" ] || fail "$1 needs MPI:$of_mpi" ;;
    esac
}

failed=0
fail() {
    echo "$*" >&2
    failed=1
}

seen=0
while read -r file; do
    dynamic=$(readelf -d "$file")
    [[ $dynamic == *NEEDED* ]] || fail "$file: readelf shows no libraries"
    check_search_path "$file" "$dynamic"
    check_libraries "$file" "$dynamic"
    seen=$((seen + 1))
done < <(binaries "$@")
[ "$seen" -gt 0 ] || fail "no ELF files in $*"
[ "$failed" -eq 0 ]
echo "$seen binaries"
