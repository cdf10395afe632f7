"""One answer from the default pair of this machine."""

from dflash_mlx import DFlashGenerator

with DFlashGenerator() as runner:
    result = runner.generate("Name three rivers.", max_new_tokens=40)

print(result)  # the text; result.thinking holds the thoughts of a model that thinks
stats = result.stats
print(f"{stats.new_tokens} tokens in {stats.rounds} rounds, {stats.tokens_per_second:.1f} tokens/s")
