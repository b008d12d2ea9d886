#!/bin/bash
# still completion: what the Tab key offers, asked of real shells. zsh and fish are tried
# where they are installed. $2 is tools/make-model.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
make_model=$2
mkdir -p "$scratch/bin" "$scratch/work/folder" "$XDG_CACHE_HOME/still/models/org/tiny"
ln -s "$still" "$scratch/bin/still"
PATH=$scratch/bin:$PATH
for quant in Q4_0 Q8_0; do
    "$make_model" tiny "$XDG_CACHE_HOME/still/models/org/tiny/tiny-$quant.gguf" >/dev/null 2>&1 ||
        { echo "make-model failed" >&2; exit 1; }
done
cd "$scratch/work" || exit 1
touch model.gguf text.txt
for shell in bash zsh fish; do
    expect 0 '' "$still" completion $shell
    cp "$scratch/out" "$scratch/script.$shell"
done
expect 2 "no script for 'tcsh'" "$still" completion tcsh
expect 2 'needs a shell' "$still" completion
expect 0 '^org/tiny:Q4_0$' "$still" list --names

# offers LINE EXPECTED...: each is offered; "!X" is not. `ask LINE` prints the offers.
offers() {
    local line=$1 want
    shift
    ask "$line" >"$scratch/offers" 2>"$scratch/err"
    [ ! -s "$scratch/err" ] || fail "$shell: '$line' says: $(head -c 300 "$scratch/err")"
    for want; do
        if [ "${want#!}" = "$want" ]; then
            grep -qxF -e "$want" "$scratch/offers" ||
                fail "$shell: '$line' offers no $want: $(tr '\n' ' ' <"$scratch/offers")"
        else
            ! grep -qxF -e "${want#!}" "$scratch/offers" || fail "$shell: '$line' offers ${want#!}"
        fi
    done
}
all_lines() {
    offers 'still ' chat generate list completion
    offers 'still ge' generate '!chat'
    offers 'still chat --te' --temp --template-arg '!--json'
    offers 'still generate --ba' --backend --batch
    offers 'still generate --backend ' cpu cuda ref
    offers 'still generate --backend c' cpu cuda '!ref'
    offers 'still bench ' prefill decode train '!cpu'
    offers 'still bench de' decode '!train'
    offers 'still help com' completion
    offers 'still completion ' bash zsh fish
    offers 'still pull --off' --offline
    offers 'still chat --off' '!--offline'
    offers 'still tokenize --file te' text.txt '!model.gguf'
    offers 'still generate mod' model.gguf
}

# bash, by its own programmable completion.
shell=bash
bash -n "$scratch/script.bash" || fail "bash does not read its script"
ask() {
    bash --norc -c '
        source "$1"
        COMP_LINE=$2 COMP_POINT=${#2}
        # Words as bash splits them, with = and : as words of their own.
        read -ra parts <<<"${2//:/ : }"
        COMP_WORDS=()
        for part in "${parts[@]}"; do COMP_WORDS+=("$part"); done
        [[ $2 != *" " ]] || COMP_WORDS+=("")
        COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
        compopt() { :; }
        _still
        printf "%s\n" "${COMPREPLY[@]}"' - "$scratch/script.bash" "$1"
}
all_lines
offers 'still chat org/t' org/tiny:Q4_0 org/tiny:Q8_0
offers 'still chat org/tiny:Q4' Q4_0 '!Q8_0'
offers 'still generate --backend=c' cpu cuda '!ref'
offers 'still chat -t ' '!model.gguf'
complete=$(bash --norc -c 'source "$1"; complete -p still' - "$scratch/script.bash")
[ "$complete" = 'complete -F _still still' ] || fail "bash: not registered: $complete"

# fish answers directly.
shell=fish
if command -v fish >/dev/null; then
    fish -n "$scratch/script.fish" || fail "fish does not read its script"
    ask() {
        HOME=$scratch XDG_CONFIG_HOME=$scratch/fish XDG_DATA_HOME=$scratch/fish \
            fish --no-config -c 'source $argv[1]; complete -C $argv[2]' "$scratch/script.fish" "$1" |
            cut -f 1
    }
    all_lines
    offers 'still chat org/t' org/tiny:Q4_0 org/tiny:Q8_0
    offers 'still generate --backend=c' --backend=cpu --backend=cuda
    # Each choice with what it means, the option with all of them.
    cut() { cat; }
    offers 'still generate --backend r' $'ref\tthe plain specification, slow and exact'
    offers 'still generate --backen' $'--backend\tcpu, cuda, ref, bf16'
    offers 'still generate --score s' $'s3\tthe Self-Saliency Score'
    unset -f cut
fi

# zsh in a terminal of its own: Tab pressed, and what the list shows.
shell=zsh
if command -v zsh >/dev/null; then
    zsh -n "$scratch/script.zsh" || fail "zsh does not read its script"
    mkdir -p "$scratch/zfunc" "$scratch/zdot" && cp "$scratch/script.zsh" "$scratch/zfunc/_still"
    cat >"$scratch/ask.zsh" <<'ZSH'
zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PS1=; stty -echo columns 200 rows 200; fpath=($1 \$fpath); autoload -Uz compinit; compinit -u -d $2/dump"
zpty -w shell 'bindkey "^I" complete-word; zstyle ":completion:*" list-grouped false; zstyle ":completion:*" verbose no; zstyle ":completion:*" insert-tab false; unsetopt menu_complete auto_menu; LISTMAX=10000'
# What was found is written out instead of inserted.
zpty -w shell 'compadd() {
    if [[ ${@[(I)-(O|A|D)]} -gt 0 ]]; then builtin compadd "$@"; return; fi
    local -a found
    builtin compadd -A found "$@"
    print -rl -- "OFFER "$^found >>'"$2"'/found
    builtin compadd "$@"
}'
zpty -w shell 'finish() { zle kill-whole-line; print -r -- DONE >>'"$2"'/found }; zle -N finish; bindkey "^X" finish'
zpty -w shell ": >$2/found; print -r -- READY >$2/ready"
for _ in {1..600}; do [[ -e $2/ready ]] && break; sleep 0.1; done
zpty -n -w shell "$3"$'\t\x18'
for _ in {1..600}; do grep -q DONE $2/found 2>/dev/null && break; sleep 0.1; done
zpty -d shell
sed -n 's/^OFFER //p' $2/found | sort -u
ZSH
    ask() {
        rm -f "$scratch/zdot/found" "$scratch/zdot/ready"
        (cd "$scratch/work" && timeout 120 zsh -f "$scratch/ask.zsh" "$scratch/zfunc" "$scratch/zdot" "$1")
    }
    offers 'still ge' generate '!chat'
    offers 'still generate --backend=c' cpu cuda '!ref'
    offers 'still bench de' decode '!train'
    offers 'still chat --te' --temp --template-arg
    offers 'still chat org/t' org/tiny:Q4_0 org/tiny:Q8_0
    offers 'still tokenize --file=te' text.txt
fi
finish
