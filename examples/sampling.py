"""Sampled text is the same with and without the drafter: draws belong to the seed and the position."""

from dflash_mlx import DFlashGenerator

draws = {"temperature": 0.8, "top_p": 0.95, "max_new_tokens": 40}

with DFlashGenerator() as runner:
    for seed in (1, 2, 1):  # the third text is the first one again
        print(seed, runner.generate("Begin a story with a fox.", seed=seed, **draws))

    comparison = runner.compare("Begin a story with a fox.", seed=1, **draws)

print("identical:", comparison.identical, "- speedup:", round(comparison.speedup, 2))
if (difference := comparison.first_difference) is not None:
    print(
        "first difference at token", difference.index, "where the logits are", difference.logit_gap, "apart"
    )
