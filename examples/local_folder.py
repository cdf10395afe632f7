"""A target and a drafter from folders on this machine: python local_folder.py TARGET DRAFTER [PROMPT]"""

import sys

from dflash_mlx import DFlashError, DFlashGenerator

if len(sys.argv) < 3:
    sys.exit(__doc__)
target, drafter, *words = sys.argv[1:]

try:
    runner = DFlashGenerator(target, drafter, mode="on")
except DFlashError as error:  # a missing file, a pair that does not fit: one sentence
    sys.exit(f"error: {error}")

with runner:
    print(runner.target_name, "drafted by", runner.draft_name, file=sys.stderr)
    print(runner.generate(" ".join(words) or "Name three rivers.", max_new_tokens=40))
