"""Bash scripts made by chance: each construct changes a size of the launch at the script's end."""

from __future__ import annotations

import random

# By construct: snippets that change NAME, which was V before; W and U are other numbers. Those with a
# "?" before them depend on more than their text: the environment, files, programs.
CONSTRUCTS: dict[str, list[str]] = {
    "assignment": ["NAME=W", "NAME=W; NAME=${NAME}", "X=W NAME=$X", "NAME=W OTHER=U", "NAME+=0", "X=NAME; NAME=W"],
    "quoting": ["NAME='W'", 'NAME="W"', "NAME=\\W", "NAME='W'\"\"", 'X="W U"; set -- $X; NAME=$1',
                'X="W  U"; set -- "$X"; NAME=$#', "X='$NAME'; NAME=${#X}", "NAME=$'W'", 'NAME="${NAME}"',
                "X=\"it's W\"; NAME=W", 'NAME=" W "; NAME=${NAME}'],
    "array": ["A=(U W); NAME=${A[1]}", "A=(1 2); A+=(3); NAME=${#A[@]}", 'A=("U W" 4); NAME=${#A[@]}',
              "A=(U W); NAME=${A[0]}", "A=(U); A[1]=W; NAME=${A[1]}", "X=1; A=(U W); NAME=${A[$X]}",
              "A=(U W); unset A; NAME=W", "A=(8 4 W); NAME=${A[-1]}", "A=(U W); B=(\"${A[@]}\" 2); NAME=${#B[@]}",
              "declare -a A=(U W); NAME=${A[1]}", "A=(U); NAME=$A"],
    "associative array": ["declare -A M=([a]=U [b]=W); NAME=${M[b]}", "declare -A M; M[x]=W; NAME=${M[x]}"],
    "function": ["f() { NAME=W; }; f", "f() { NAME=W; }", "f() { NAME=$1; }; f W", "f() { local NAME=W; }; f",
                 "f() { local X=$1; NAME=$X; }; f W U", "function f { NAME=$2; }; f U W", "f() { NAME=$#; }; f a b c",
                 "f() { return 1; NAME=U; }; f || NAME=W", "f() { NAME=W; return; NAME=U; }; f",
                 "f() { g; }; g() { NAME=W; }; f", "f() { shift; NAME=$1; }; f U W", "f() { declare NAME=W; }; f",
                 "f() { declare -g NAME=W; }; f", "f() { NAME=W; }; f() { NAME=U; }; f", "NAME=U f; f() { NAME=W; }",
                 "f() { NAME=W; }; unset -f f; f 2>/dev/null", "f() { X=$NAME; }; NAME=W f; NAME=$X"],
    "for loop": ["for NAME in U W; do :; done", "for i in 1 2 3; do NAME=$((i * 2)); done", "for i in; do NAME=W; done",
                 "for i in U W; do NAME=$i; break; done", "for i in 1 2; do [ $i = 2 ] && continue; NAME=$i; done",
                 "for ((i = 0; i < 3; i++)); do NAME=$((NAME + 1)); done", "A=(U W); for i in ${A[@]}; do NAME=$i; done",
                 "for i in {1..4}; do NAME=$i; done", "for i in 1 2; do for j in 1 2; do NAME=$((i * j)); break 2; done; done",
                 "for i in 1 2; do for j in 1 2; do continue 2; done; NAME=W; done"],
    "while loop": ["i=0; while [ $i -lt 3 ]; do i=$((i + 1)); NAME=$i; done", "until [ $NAME -ge 9 ]; do NAME=$((NAME + 1)); done",
                   "while false; do NAME=W; done", "while true; do NAME=W; break; done", "i=4; while ((i > 2)); do ((i--)); NAME=$i; done",
                   "? while read NAME; do :; done <<< 'W'", "? while [ -f x ]; do NAME=W; done"],
    "condition": ["if [ 1 = 1 ]; then NAME=W; fi", "if [[ U == W ]]; then NAME=U; else NAME=W; fi", "if ((NAME > 2)); then NAME=W; fi",
                  "if [ $NAME -gt 3 ]; then NAME=W; elif [ $NAME -eq 2 ]; then NAME=U; fi", "[[ -z \"\" ]] && NAME=W",
                  "if ! true; then NAME=W; fi", "X=abc; [[ $X == a* ]] && NAME=W", 'X=abc; [[ $X == "a*" ]] && NAME=W',
                  "if [ -n \"$NAME\" ] && [ $NAME != U ]; then NAME=W; fi", "X=; [ -z $X ] && NAME=W", "X=; [ -n $X ] && NAME=W",
                  "if test $NAME = U; then NAME=W; fi", "? if [ -f x ]; then NAME=W; fi", "? [ -d . ] && NAME=W",
                  "if :; then NAME=W; fi", "if [ $NAME -eq U -o 1 -eq 1 ]; then NAME=W; fi", "[[ abc =~ b ]] && NAME=W",
                  "if [[ ! U -lt 3 || $NAME -gt 4 ]]; then NAME=W; fi", "? if cp x y 2>/dev/null; then NAME=W; fi"],
    "case": ["case $NAME in U) NAME=W;; *) NAME=3;; esac", "case a in b) NAME=U;; a|c) NAME=W;; esac", "case x in y) NAME=W;; esac",
             "case W in [0-9]*) NAME=W;; esac", "case a in a) NAME=U;& b) NAME=W;; esac", 'case "a*" in "a*") NAME=W;; esac'],
    "arithmetic": ["NAME=$((NAME * 2))", "((NAME = W))", "((NAME += 2))", "let NAME=W", "let 'NAME = NAME + 1'", "NAME=$((W > 3 ? W : 2))",
                   "NAME=$(( (W + U) / 2 % 7 + 1 ))", "((NAME++))", "X=$((NAME++))", "NAME=$((1 + 2 * 3 - 4))", "X=2+1; NAME=$((X * 2))",
                   "X=2+1; NAME=$(($X * 2))", "NAME=$((2 ** 3))", "NAME=$((17 / -2 + 12))", "NAME=$((-17 % 5 + 4))", "NAME=$((010))",
                   "NAME=$((0x10))", "((NAME > 100)) || NAME=W", "NAME=$((1 << 2))", "NAME=$((!0 + 1))", "NAME=$((7 & 5 | 2))",
                   "NAME=$((X = W))", "NAME=$((1 < 2 == 1))"],
    "and, or": ["true && NAME=W", "false || NAME=W", "false && NAME=W", "true || NAME=W", "true && false || NAME=W", "NAME=W || NAME=U",
                "{ false; true; } && NAME=W", "! true || NAME=W", "? cp x y 2>/dev/null || NAME=W", "? ls > /dev/null && NAME=W",
                "(exit 1) || NAME=W", "? grep x y 2>/dev/null || NAME=W"],
    "subshell": ["(NAME=W)", "( NAME=W; echo $NAME ) > /dev/null", "(NAME=W; exit 3)", "{ NAME=W; }", "(cd /; NAME=W) && NAME=U"],
    "pipe": ["echo W | read NAME", "true | NAME=W", "NAME=W | cat", "echo x | { NAME=W; }", "echo W | while read NAME; do :; done"],
    "background": ["NAME=W &\nwait", "{ NAME=W; } &\nwait", "(NAME=W) & wait"],
    "substitution": ["NAME=$(echo W)", "NAME=`echo W`", "X=$(NAME=W; echo $NAME)", "NAME=$(printf W)", "X=$(exit 3) || NAME=W",
                     "f() { echo W; }; NAME=$(f)", "NAME=$(echo $((W + 1)))", "X=$(cat <<< W); NAME=$X"],
    "heredoc": ["cat > /dev/null <<EOF\nNAME=W\nEOF", "cat > /dev/null <<'EOF'\n$(NAME=W)\nEOF", ": <<EOF\n${NAME:=W}\nEOF", ": <<EOF\n$((NAME = W))\nEOF",
                "? read NAME <<EOF\nW\nEOF", "? read NAME <<< W", "cat > /dev/null <<-EOF\n\tNAME=W\n\tEOF\nNAME=U"],
    "default": ["NAME=; NAME=${NAME:-W}", "unset NAME; NAME=${NAME-W}", "NAME=${NAME:-W}", "NAME=; : ${NAME:=W}", "NAME=${NAME:+W}", "unset NAME; : ${NAME=W}",
                "NAME=; NAME=${NAME-W}W", "unset X; NAME=${X:+U}W", "? NAME=${X_OF_THE_ENVIRONMENT:-W}", "X=W; unset NAME; NAME=${NAME:-$X}"],
    "expansion": ["X=Wx; NAME=${X%x}", "X=xW; NAME=${X#x}", "X=NAME; NAME=W; NAME=${!X}", "X=aW; NAME=${X:1}", "X=aWa; NAME=${X//a/}", "X=abcd; NAME=${#X}",
                  "X=(1 2 3); NAME=${X[@]:1:1}", "set -- U W; NAME=${2}", "set -- U W; NAME=${@: -1}"],
    "unset": ["unset NAME; NAME=W", "X=NAME; unset $X; NAME=${NAME:-W}", "unset -v NAME; NAME=${NAME:-W}", "unset -f NAME"],
    "printf and read": ["printf -v NAME %s W", "printf -v NAME '%d' W", "? read NAME < /dev/null", "mapfile -t X <<< W; NAME=${X[0]}", "IFS=, read -r NAME X <<< 'W,U'"],
    "eval": ["eval NAME=W", 'eval "NAME=W"', 'X=NAME; eval "$X=W"', "eval 'NAME=U; NAME=W'", "X='NAME=W'; eval $X", "? eval \"$X_OF_THE_ENVIRONMENT\"; NAME=W"],
    "attributes": ["declare -n R=NAME; R=W", "declare -i NAME; NAME=W+1", "declare NAME=W", "export NAME=W", "readonly X=W; NAME=$X", "typeset NAME=W", "export NAME; NAME=W",
                   "declare -i X=W; NAME=$X", "f() { local -n R=$1; R=W; }; f NAME"],
    "prefix": ["NAME=W true", "NAME=W :", "NAME=W eval 'X=$NAME'; NAME=$X", "X=W; NAME=$X true; NAME=$X", "NAME=W; NAME=U echo > /dev/null"],
    "getopts and set": ["set -- -n W; while getopts n: X; do NAME=$OPTARG; done", "set -- W U; NAME=$1", "set W; NAME=$1", "set -- a b; shift; NAME=$#", "set -- U W; shift 1; NAME=$1"],
    "trap and alias": ["trap 'NAME=W' EXIT", "alias x='NAME=W'", "trap - INT; NAME=W"],
    "split": ["X='U W'; for i in $X; do NAME=$i; done", 'X="U W"; for i in "$X"; do NAME=${#i}; done', "IFS=,; X=U,W; set -- $X; NAME=$2", "X='a  b'; set -- $X; NAME=$#"],
    "source": ["? source ./missing.sh 2>/dev/null; NAME=W", "? . ./missing.sh 2>/dev/null"],
    "child shell": ["bash -c 'NAME=W'", "export NAME; bash -c 'NAME=W'", "bash -c \"NAME=W\"; NAME=U"],
    "exit": ["if false; then exit; fi; NAME=W", "f() { NAME=W; [ 1 = 2 ] && exit; }; f", "set -e; NAME=W; false || true", "set +e; false; NAME=W", "set -u; NAME=W"],
}  # fmt: skip
NAMES = ("TP", "PP", "CP", "N", "G")
LAUNCHES = (
    "torchrun --nnodes $N --nproc-per-node $G p.py --tensor-model-parallel-size $TP "
    "--pipeline-model-parallel-size $PP --context-parallel-size $CP",
    "torchrun --nnodes=${N} --nproc_per_node=${G} p.py --tensor-model-parallel-size=${TP} "
    "--pipeline-model-parallel-size ${PP} --context-parallel-size=$CP",
    'ARGS="--tensor-model-parallel-size $TP --context-parallel-size $CP"\n'
    'torchrun --nnodes "$N" --nproc-per-node "$G" p.py $ARGS --pipeline-model-parallel-size $PP',
    "ARGS=(--tensor-model-parallel-size $TP --context-parallel-size $CP)\nARGS+=(--lr 1)\n"
    'torchrun --nnodes "$N" --nproc-per-node $G p.py "${ARGS[@]}" --pipeline-model-parallel-size $PP',
    "launch() {\n  torchrun --nnodes $N --nproc-per-node $G p.py "
    '"$@" --pipeline-model-parallel-size $PP\n}\n'
    "launch --tensor-model-parallel-size $TP --context-parallel-size $CP",
    'CMD="torchrun --nnodes $N --nproc-per-node $G p.py --tensor-model-parallel-size $TP '
    '--context-parallel-size $CP --pipeline-model-parallel-size $PP"\neval "$CMD"',
)


def scripts(count: int, seed: int) -> list[tuple[str, set[str], bool]]:
    """Scripts, each with its constructs and whether its text alone decides what it launches."""
    chance = random.Random(seed)
    made = []
    names = list(CONSTRUCTS)
    for number in range(count):
        # Every construct comes as often as any other.
        chosen = [names[(number * 2 + i) % len(names)] for i in (0, 1)]
        lines = [f"{name}={chance.randint(2, 8)}" for name in NAMES]
        is_decided = True
        for construct in chosen:
            snippet = chance.choice(CONSTRUCTS[construct])
            is_decided &= not snippet.startswith("?")
            snippet = snippet.lstrip("? ").replace("NAME", chance.choice(NAMES))
            snippet = snippet.replace("W", str(chance.randint(2, 9)))
            snippet = snippet.replace("U", str(chance.randint(2, 9)))
            snippet = snippet.replace("V", str(chance.randint(2, 9)))
            lines.append(snippet)
        lines.append(chance.choice(LAUNCHES))
        made.append(("\n".join(lines) + "\n", set(chosen), is_decided))
    return made
