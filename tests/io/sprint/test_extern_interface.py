"""The module that RASR loads, called as RASR calls it, and read by RETURNN's own code."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from returnn.util.basic import read_pickled_object

from seqshard.io.sprint import extern_interface
from seqshard.io.sprint.messages import Exit, Init, parse_message

FEATURES = np.asfortranarray(np.arange(12, dtype="float32").reshape(3, 4))
ALIGNMENT = np.array([0, 1, 1, 2], "int32")


class Connection:
    """A fresh copy of the module, and the other ends of its pipes."""

    def __init__(self, stack):
        spec = importlib.util.spec_from_file_location("fresh", extern_interface.__file__)
        self.module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        out, self.c2p_fd = os.pipe()
        self.p2c_fd, own_end = os.pipe()
        self.stream = stack.enter_context(os.fdopen(out, "rb", 0))
        stack.callback(os.close, own_end)
        self.config = f"action:ExternSprintDataset,c2p_fd:{self.c2p_fd},p2c_fd:{self.p2c_fd}"

    def init_trainer(self, **options):
        arguments = {"inputDim": 3, "outputDim": 5, "targetMode": "target-generic", **options}
        return self.module.init(config=self.config, future_argument=1, **arguments)

    def read(self):
        """The next message as RETURNN reads it, and that ours is the same."""
        payload = self._read_payload()
        reader, writer = os.pipe()
        with os.fdopen(reader, "rb", 0) as source, os.fdopen(writer, "wb", 0) as sink:
            sink.write(len(payload).to_bytes(4, "little") + payload)
            kind, args = read_pickled_object(source)
        ours = parse_message(payload)
        if isinstance(ours, Init):
            assert (ours.input_dim, ours.output_dim, ours.num_segments) == args
        elif isinstance(ours, Exit):
            assert args is None
        else:
            assert ours.name == args[0]
            np.testing.assert_array_equal(ours.features, args[1])
            assert list(ours.targets) == list(args[2])
        return kind, args

    def _read_payload(self):
        return self.stream.read(int.from_bytes(self.stream.read(4), "little"))


@pytest.fixture
def connection():
    with contextlib.ExitStack() as stack:
        yield Connection(stack)


@pytest.mark.parametrize(
    ("function", "arguments", "targets"),
    [
        ("feedInput", {}, []),
        ("feedInputUnsupervised", {"weights": np.ones(4)}, []),
        ("feedInputAndTargetAlignment", {"targetAlignment": ALIGNMENT}, ["classes"]),
        ("feedInputAndTargetSegmentOrth", {"targetSegmentOrth": "a b"}, ["orth"]),
        ("feedInputAndTarget", {"alignment": ALIGNMENT, "orthography": "a"}, ["classes", "orth"]),
        ("feedInputAndTarget", {"speaker_name": "x", "speaker_gender": "y", "new": 1}, []),
    ],
)
def test_trainer_functions(connection, function, arguments, targets):
    assert connection.init_trainer() is None
    getattr(connection.module, function)(features=FEATURES, segmentName="a/b", **arguments)
    connection.module.exit()
    assert connection.read() == ("init", (3, 5, None))
    kind, (name, features, found) = connection.read()
    assert (kind, name, list(found)) == ("data", "a/b", targets)
    np.testing.assert_array_equal(features, FEATURES)
    assert features.flags.f_contiguous
    assert connection.read() == ("exit", None)
    assert connection.stream.read(1) == b""


def test_number_of_segments(connection):
    segments = ["a", "b", "c"]
    ordered = connection.module.getSegmentList("corpus", segments, config="", future_argument=1)
    assert list(ordered) == segments
    connection.init_trainer()
    connection.module.exit()
    assert connection.read() == ("init", (3, 5, 3))


@pytest.mark.parametrize("soft", [False, True])
def test_control(connection, soft):
    arguments = {"name": "Sprint.PythonControl", "config": connection.config, "version": 3}
    control = connection.module.init(**arguments)
    assert connection.module.init(**arguments) is control
    control.init_processing(input_dim=3, output_dim=5, future_argument=1)
    frames, weights = np.array([0, 0, 1], "int32"), np.array([0.5, 0.5, 1], "float32")
    control.process_segment(
        name="a",
        orthography="x y",
        features=FEATURES,
        alignment=None if soft else ALIGNMENT,
        soft_alignment=(frames, ALIGNMENT[:3], weights),
        speaker_name=None,
        future_argument=1,
    )
    control.exit(future_argument=1)
    connection.module.exit()
    assert connection.read() == ("init", (3, 5, None))
    _, (name, _, targets) = connection.read()
    parts = [f"classes[sparse:coo:2:{part}]" for part in range(3)]
    assert (name, sorted(targets)) == ("a", sorted(["orth", *(parts if soft else ["classes"])]))
    if soft:
        for part, expected in zip(parts, (frames, ALIGNMENT[:3], weights), strict=True):
            np.testing.assert_array_equal(targets[part], expected)
    assert connection.read() == ("exit", None)


def test_misuse(connection):
    with pytest.raises(ValueError, match="criterion-by-sprint cannot be used"):
        connection.init_trainer(targetMode="criterion-by-sprint")
    with pytest.raises(ValueError, match="unknown action 'other'"):
        connection.module.init(inputDim=1, outputDim=1, config="action:other", targetMode="x")
    with pytest.raises(RuntimeError, match="before it called init"):
        connection.module.feedInput(features=FEATURES)
    connection.init_trainer()
    with pytest.raises(ValueError, match="segment 'a' has 4 features, not 3"):
        connection.module.feedInput(features=FEATURES.T, segmentName="a")
    connection.module.exit()


def test_exit_without_data(connection, capsys):
    connection.module.exit()
    assert "nothing was sent" in capsys.readouterr().out
    os.close(connection.c2p_fd)
    os.close(connection.p2c_fd)


def test_needs_no_package(tmp_path):
    """RASR's Python may have nothing installed."""
    (tmp_path / "extern_interface.py").write_bytes(
        pathlib.Path(extern_interface.__file__).read_bytes()
    )
    code = "import sys; sys.path.append(sys.argv[1]); import extern_interface as module; "
    code += "print('numpy' in sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", code, str(tmp_path)]
    assert subprocess.check_output(command, text=True) == "False\n"
