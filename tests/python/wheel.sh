# shellcheck shell=bash
# For tests of the Python package, which source this: the wheel, built from the library of this
# build, in a folder of its own.
#
#   install_wheel PYTHON_ENV SOURCE LIBRARY SCRATCH
#
# leaves the package in SCRATCH/site; PYTHON_ENV has scikit-build-core.
install_wheel() {
    local pip="$1/bin/pip" wheel
    "$pip" wheel --quiet --no-deps --no-build-isolation --disable-pip-version-check \
        -C build-dir="$4/build" -C cmake.define.STILL_LIBRARY="$3" \
        -w "$4" "$2/python"
    wheel=$(echo "$4"/still-*.whl)
    case $wheel in
    *-py3-none-linux_*.whl) ;;
    *) echo "$wheel is not for every Python" >&2 && return 1 ;;
    esac
    "$pip" install --quiet --no-deps --no-compile --disable-pip-version-check \
        --target "$4/site" "$wheel"
}
