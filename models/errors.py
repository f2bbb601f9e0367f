"""Errors of the model layer, one tree: whoever starts a worker or a gateway prints the message as it is, one line, and exits.

`ModelFileError` means that a file is missing, damaged or of a kind that is not supported; `ModelPullError` that the default
model could not be fetched. Both name the file or the field, what was found, and what would have been right.
"""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be had. The message is one line for people."""


class ModelFileError(ModelError):
    """A model file is missing, damaged, or of an unsupported kind."""


class ModelPullError(ModelError):
    """The default model could not be fetched and verified."""
