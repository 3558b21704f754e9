#!/usr/bin/env bash
# The paper's runs as commands of train.py: training, then the evaluation of what was trained.
#
#     bash experiments/recipes.sh RECIPE [more flags of train.py …]
#
# RECIPE is 3b-gsm8k, 7b-gsm8k, 7b-bigmath, 14b-bigmath or 32b-bigmath. More flags go to the training alone; leave --out
# to this script. The flags below are those of Table 4 of QeRL (arXiv 2510.11696), and of its released scripts where that
# is silent. Beside what comments say, three things differ from the paper: AdamW has 32 bits (theirs: 8), the norms are
# frozen, and prompts and rewards are those of tasks.py.
# None of the five was run on its checkpoint here; results/LOG.md has their seconds and GB.
set -euo pipefail
recipe=${1:?name a recipe: 3b-gsm8k, 7b-gsm8k, 7b-bigmath, 14b-bigmath or 32b-bigmath}
shift

base=(
    --model "Qwen/Qwen2.5-$(echo "${recipe%%-*}" | tr b B)-Instruct"
    --quant rtn                                  # paper: AWQ for its NVFP4 models; scripts: rtn
    --rank 32 --alpha 32                         # scripts: 16 and 16
)
paper=(
    --correction none                            # ρ compares with the trainer's own policy, so ρ = 1
    --clip-low 0.2 --clip-high 0.28              # no effect at ρ = 1; scripts with grpo: both 0.2
    --overlong mask                              # truncated answers are not trained on
    --lr 1e-5                                    # the paper's; the next three are the scripts'
    --schedule cosine --weight-decay 0.1 --max-grad-norm 0.2
    --sigma-start 1e-2 --sigma-end 5e-4          # scripts: to 1e-4; §4.1: from 5e-2
    --sigma-stages 10
    --eval-every 50 --save-every 50
)
# One update a rollout, as by default: Table 4 says 4 on GSM8K, the paper's authors say 1 (in their issue 12).
# Table 4's batch of 128 is read as answers, as TRL counts: with 128 prompts a step, 600 steps are ten epochs.
# A warm-up of a tenth of the steps is the scripts'.
case $recipe in
    3b-gsm8k | 7b-gsm8k)
        data=(--task gsm8k)
        train=(--data openai/gsm8k/main --loss grpo --prompts 16 --group-size 8 --max-new-tokens 4096
               --steps 600 --warmup 60)
        test=openai/gsm8k/main:test
        ;;
    7b-bigmath | 14b-bigmath | 32b-bigmath)
        # The paper does not say how long it trained, but evaluates after 500 to 1000 steps. The scripts' data
        # has BigMath's levels 3 to 5, for the 32B 4 and 5.
        levels=level_3_4_5
        [ "$recipe" = 32b-bigmath ] && levels=level_4_5
        data=(--task math)
        train=(--data "open-r1/Big-Math-RL-Verified-Processed/$levels" --loss dapo --prompts 8 --group-size 16
               --max-new-tokens 8192 --steps 1000 --warmup 100)
        test=HuggingFaceH4/MATH-500:test         # the paper also took AIME 24 and 25 and AMC 23
        ;;
    *)
        echo "recipes.sh: there is no recipe $recipe" >&2
        exit 2
        ;;
esac
cd "$(dirname "$0")/.."
python train.py --out "runs/$recipe" "${base[@]}" "${data[@]}" "${paper[@]}" "${train[@]}" "$@"
# The paper's evaluation: all problems of a test set, the mean of several answers (here 8) to each
python train.py --steps 0 --adapter "runs/$recipe/adapter" "${base[@]}" "${data[@]}" --test "$test" \
    --eval-samples 8 --temperature 0.6 --eval-top-p 0.95 --max-new-tokens 4096
