"""What can go wrong, as a tree; every message says what was found, what was expected and what to try.

DFlashError                     exit 1
├── UsageError (ValueError)     exit 2   an option or a prompt that cannot be honoured
├── NumericalError              exit 1   a model whose results are no numbers any more
├── WriteError                  exit 1   files that cannot be written, or not as they should be
└── LoadError                   exit 1   names and files that do not become a working pair
    ├── HubError                         not fetched: missing, gated, offline
    ├── CheckpointError                  files that are truncated, missing or contradict their config
    ├── PairError                        a target and a drafter that do not fit each other
    └── UnsupportedError                 an architecture, format or cache kind that is not known here
"""


class DFlashError(Exception):
    """Base of everything this package raises on purpose; `exit_code` is the console's."""

    exit_code = 1


class UsageError(DFlashError, ValueError):
    """An option or a prompt that cannot be honoured; raised before any model work."""

    exit_code = 2


class NumericalError(DFlashError):
    """A model whose results are no numbers any more, such as after an overflow of float16."""


class WriteError(DFlashError):
    """Files that cannot be written, or that do not read back as they were meant."""


class LoadError(DFlashError):
    """Names and files that do not become a working pair."""


class HubError(LoadError):
    """A repository or file that could not be fetched."""


class CheckpointError(LoadError):
    """Files that are truncated, missing, or contradict their config."""


class PairError(LoadError):
    """A target and a drafter that do not fit each other."""


class UnsupportedError(LoadError):
    """An architecture, file format or cache kind that is not supported."""
