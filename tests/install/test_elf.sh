#!/usr/bin/env bash
# What the linker wrote into our binaries, as the dynamic linker reads it.
#
#   test_elf.sh [--sanitized] [--without PATH] FILE_OR_FOLDER ...
#                    every ELF program and shared library in them
#   --sanitized      compiled for a sanitizer, without guards of its own
#   --without PATH   none has this text in it, but for tests, which name their fixtures,
#                    and examples, which find libstill.so in the build folder
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
            # shellcheck disable=SC2016 # the linker expands it
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

# Loaded at any address, nothing writable that the linker has filled in, no code on the
# stack; guarded buffers in ours, which are compiled with them. See cmake/hardening.cmake.
check_guards() { # FILE DYNAMIC_SECTION
    local head symbols
    head=$(readelf -hlW "$1")
    [[ $head =~ Type:\ +DYN ]] || fail "$1 is loaded at a fixed address"
    [[ $head == *GNU_RELRO* && $2 =~ BIND_NOW|Flags:.*NOW ]] || fail "$1 has no full RELRO"
    [[ $head =~ GNU_STACK[^R]*RW\  ]] || fail "$1 may run code on its stack"
    if $sanitized; then return; fi
    case $1 in
    */still | */libstill.so*)
        symbols=$(readelf --dyn-syms -W "$1")
        [[ $symbols == *__stack_chk_fail* ]] || fail "$1 has no stack protector"
        [[ $symbols == *__snprintf_chk* ]] || fail "$1 has no FORTIFY_SOURCE"
        ;;
    esac
}

check_without() { # FILE
    case $1 in */tests/test_* | */examples/*) return 0 ;; esac
    ! grep -qaF -- "$without" "$1" || fail "$1 has the path $without in it"
}

sanitized=false without=
while [[ $1 == --* ]]; do
    case $1 in
    --sanitized) sanitized=true && shift ;;
    --without) without=$2 && shift 2 ;;
    *) echo "test_elf.sh: what is $1?" >&2 && exit 2 ;;
    esac
done

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
    check_guards "$file" "$dynamic"
    [ -z "$without" ] || check_without "$file"
    seen=$((seen + 1))
done < <(binaries "$@")
[ "$seen" -gt 0 ] || fail "no ELF files in $*"
[ "$failed" -eq 0 ]
echo "$seen binaries"
