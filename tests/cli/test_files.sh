#!/bin/bash
# Files the commands write: limits on their size, full devices, links planted where they
# will be. $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
tiny=$scratch/tiny.gguf
"$make_model" tiny "$tiny" >/dev/null 2>&1 || { echo "make-model failed" >&2; exit 1; }
mkdir "$scratch/work" && cd "$scratch/work" || exit 1
seq 400 >../text
holds() { [ "$(find . | sort | tr '\n' ' ')" = "$1" ] || fail "here: $(find . | sort | tr '\n' ' '), expected: $1"; }
write_state=("$still" generate "$tiny" -p hello -n 2 --save-state state)
write_page=("$still" saliency "$tiny" ../text --chunk 16 --ctx 100 --out page.html --quiet)
write_csv=("$still" bench decode "$tiny" --lengths 8 --steps 2 --rounds 1 --against "" --method softmax --quiet --csv)
limited=(bash -c 'ulimit -f 4; exec "$@"' -)

# Past the limit: one line that says what to do, no signal, nothing left behind; and what
# was there stays.
expect 1 'state: cannot write: File too large .*ulimit -f' "${limited[@]}" "${write_state[@]}"
expect 1 'page.html: cannot write: File too large .*ulimit -f' "${limited[@]}" "${write_page[@]}"
holds '. '
expect 0 '' "${write_state[@]}"
expect 0 '' "${write_page[@]}"
cp state ../state
cp page.html ../page.html
expect 1 'File too large' "${limited[@]}" "${write_state[@]}"
expect 1 'File too large' "${limited[@]}" "${write_page[@]}"
holds '. ./page.html ./state '
cmp -s state ../state || fail "a failed write changed the state that was there"
cmp -s page.html ../page.html || fail "a failed write changed the page that was there"

# Links, at the name itself and at names that used to be taken on the way: none is
# followed.
printf precious >../precious
ln -s ../precious page.html.part
for name in page.html state table.csv; do ln -sf ../precious "$name"; done
expect 0 '' "${write_page[@]}"
expect 0 '' "${write_state[@]}"
expect 0 '' "${write_csv[@]}" table.csv
[ "$(cat ../precious)" = precious ] || fail "a link was followed"
for name in page.html state table.csv; do [ ! -L "$name" ] || fail "$name is a link still"; done
rm page.html.part

# Devices take what they can and stay devices.
expect 0 '' "${write_csv[@]}" /dev/null
[ -c /dev/null ] || fail "/dev/null is a device no more"
if [ -c /dev/full ]; then
    expect 1 '/dev/full: cannot write: No space left on device .*disk is full' "${write_csv[@]}" /dev/full
fi
expect 1 'its folder is not there' "${write_csv[@]}" no/such/table.csv
expect 1 'its folder is not there' "$still" generate "$tiny" -p hello -n 2 --save-state no/such/state
holds '. ./page.html ./state ./table.csv '
finish
