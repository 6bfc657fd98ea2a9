"""The Python module that RASR loads in order to send its sequences to another process.

RASR's nn-trainer knows it as a PythonTrainer (`--*.trainer=python-trainer`), and also as
PythonControl and PythonSegmentOrder. It calls the functions of this module by these names and with
these keyword arguments. What it sends is what `seqshard.io.sprint.messages` describes; RETURNN's
ExternSprintDataset understands it as well.

This file needs no other file and no package, as it runs inside the Python that RASR is linked with.
"""

from __future__ import annotations

import os
import pickle
import struct
from typing import Any

# The newest pickle protocol that all readers know.
PICKLE_PROTOCOL = min(5, pickle.HIGHEST_PROTOCOL)
MAX_MESSAGE_BYTES = 2**31 - 1


class Sender:
    """Sends messages over an inherited pipe: 4 bytes of length (`<i`), then a pickle.

    Args:
        c2p_fd: descriptor that this process writes to.
        p2c_fd: descriptor that the other process could write to; it has nothing to say so far.
        input_dim: number of features.
        output_dim: number of classes.
        num_segments: segments of the corpus, or None; not all need to come.
    """

    def __init__(
        self, c2p_fd: int, p2c_fd: int, input_dim: int, output_dim: int, num_segments: int | None
    ) -> None:
        self._input_dim = input_dim
        self._out = os.fdopen(c2p_fd, "wb", 0)
        self._in = os.fdopen(p2c_fd, "rb", 0)
        self._send("init", (input_dim, output_dim, num_segments))

    def send_segment(self, name: str | None, features: Any, targets: dict[str, Any]) -> None:
        """Sends a sequence.

        Args:
            name: of the segment.
            features: numpy array [feature, time], as RASR has them.
            targets: arrays and strings.
        """
        if features.shape[0] != self._input_dim:
            raise ValueError(
                f"segment {name!r} has {features.shape[0]} features, not {self._input_dim}"
            )
        self._send("data", (name, features, targets))

    def close(self) -> None:
        """Tells the other process that all was sent."""
        self._send("exit", None)
        self._out.close()
        self._in.close()

    def _send(self, kind: str, args: Any) -> None:
        message = pickle.dumps((kind, args), protocol=PICKLE_PROTOCOL)
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(message)} bytes is too long for the protocol")
        for part in (struct.pack("<i", len(message)), message):
            rest = memoryview(part)
            while rest:
                rest = rest[self._out.write(rest) :]


_sender: Sender | None = None
_num_segments: int | None = None


def _log(text: str) -> None:
    print(f"seqshard extern interface, process {os.getpid()}: {text}", flush=True)


def _parse_config(text: str) -> dict[str, str]:
    return dict(part.split(":", 1) for part in text.split(",") if part)


def _open_sender(config: dict[str, str], input_dim: int, output_dim: int) -> None:
    global _sender
    if _sender is None:
        c2p_fd, p2c_fd = int(config["c2p_fd"]), int(config["p2c_fd"])
        _sender = Sender(c2p_fd, p2c_fd, input_dim, output_dim, _num_segments)
        _log(f"{input_dim} features, {output_dim} classes, segments: {_num_segments}")


def _close_sender() -> None:
    global _sender
    if _sender is None:
        _log("exit, and nothing was sent")
    else:
        sender, _sender = _sender, None
        sender.close()
        _log("exit")


def _send(name: str | None, features: Any, targets: dict[str, Any]) -> None:
    if _sender is None:
        raise RuntimeError("RASR sends data before it called init")
    present = {key: value for key, value in targets.items() if value is not None}
    _sender.send_segment(name, features, present)


# PythonSegmentOrder. RASR calls it before everything else.


def getSegmentList(corpusName: str, segmentList: list[str], **_: Any) -> list[str]:
    """Leaves the order as it is, as RASR itself shuffles. Only counts."""
    global _num_segments
    _num_segments = len(segmentList)
    _log(f"corpus {corpusName!r} has {_num_segments} segments")
    return segmentList


# PythonTrainer. RASR calls init when it sees the first data.


def init(**kwargs: Any) -> PythonControl | None:
    """Opens the connection; or gives the object to control, if RASR asks for PythonControl.

    Args:
        kwargs: inputDim, outputDim, config ("action:ExternSprintDataset,c2p_fd:N,p2c_fd:M") and
            targetMode; for PythonControl name and config. RASR may pass more.

    Raises:
        ValueError: if the configuration asks for something else than sending data.
    """
    if kwargs.get("name") == "Sprint.PythonControl":
        return PythonControl.get(kwargs["config"])
    if kwargs.get("targetMode") == "criterion-by-sprint":
        raise ValueError("targetMode criterion-by-sprint cannot be used to send data")
    config = _parse_config(kwargs["config"])
    if config.get("action") != "ExternSprintDataset":
        raise ValueError(f"unknown action {config.get('action')!r} in the configuration")
    _open_sender(config, kwargs["inputDim"], kwargs["outputDim"])
    return None


def exit() -> None:
    """RASR has no more data."""
    _close_sender()


def feedInput(features: Any, weights: Any = None, segmentName: str | None = None, **_: Any) -> None:
    """Sends a sequence without targets; the weights are not sent."""
    _send(segmentName, features, {})


feedInputUnsupervised = feedInput


def feedInputAndTargetAlignment(
    features: Any,
    targetAlignment: Any,
    weights: Any = None,
    segmentName: str | None = None,
    **_: Any,
) -> None:
    """Sends a sequence with the class of each frame."""
    _send(segmentName, features, {"classes": targetAlignment})


def feedInputAndTargetSegmentOrth(
    features: Any,
    targetSegmentOrth: str,
    weights: Any = None,
    segmentName: str | None = None,
    **_: Any,
) -> None:
    """Sends a sequence with its orthography."""
    _send(segmentName, features, {"orth": targetSegmentOrth})


def feedInputAndTarget(
    features: Any,
    weights: Any = None,
    segmentName: str | None = None,
    orthography: str | None = None,
    alignment: Any = None,
    speaker_name: str | None = None,
    speaker_gender: str | None = None,
    **_: Any,
) -> None:
    """Sends a sequence with what targets there are.

    As with RETURNN's module, the speaker is only sent by `PythonControl`.
    """
    _send(segmentName, features, {"classes": alignment, "orth": orthography})


class PythonControl:
    """What RASR's PythonControl calls, for corpora that are read without a trainer."""

    _instance: PythonControl | None = None

    @classmethod
    def get(cls, config: str) -> PythonControl:
        """The only instance; RASR may ask for it more than once."""
        if cls._instance is None:
            cls._instance = cls(config)
        return cls._instance

    def __init__(self, config: str) -> None:
        self._config = _parse_config(config)

    def init_processing(self, input_dim: int, output_dim: int, **_: Any) -> None:
        """Opens the connection."""
        _open_sender(self._config, input_dim, output_dim)

    def process_segment(
        self,
        name: str,
        orthography: str | None,
        features: Any,
        alignment: Any,
        soft_alignment: tuple[Any, Any, Any] | None,
        speaker_name: str | None = None,
        **_: Any,
    ) -> None:
        """Sends a sequence.

        Args:
            name: of the segment.
            orthography: text, or None.
            features: [feature, time].
            alignment: class of each frame, or None.
            soft_alignment: the sparse matrix [time, class] of an alignment with weights as its
                frames, classes and weights, three arrays of one length; used if there is no
                `alignment`.
            speaker_name: or None.
        """
        targets = {"orth": orthography, "speaker_name": speaker_name, "classes": alignment}
        if alignment is None and soft_alignment is not None:
            frames, classes, weights = soft_alignment
            targets["classes[sparse:coo:2:0]"] = frames
            targets["classes[sparse:coo:2:1]"] = classes
            targets["classes[sparse:coo:2:2]"] = weights
        _send(name, features, targets)

    def exit(self, **_: Any) -> None:
        """RASR has no more data."""
        _close_sender()
