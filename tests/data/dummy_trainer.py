"""Behaves like RASR's nn-trainer with a Python trainer, and can misbehave in many ways.

Understands RASR's options (`--*.key=value`) and reads the corpus from those below; loads the Python
module that `pymod-path`, `pymod-name` and `pymod-config` name and feeds it. Sequence i has
`corpus_seq(i)`, so that a test knows what must come.

    num-seqs, input-dim, output-dim: the corpus.
    feed: function of the module to call: feedInputAndTarget (default), ..., or "control".
    behave: what goes wrong, see BEHAVIOURS; at-seq: before which sequence.
"""

import os
import signal
import sys
import time
from importlib import import_module

import numpy as np


def corpus_name(index):
    return f"corpus/rec-{index}/seg"


def corpus_seq(index, input_dim, output_dim):
    """Name, features [dim, time], alignment [time] and orthography of a sequence."""
    rng = np.random.RandomState(1000 + index)
    num_frames = 5 + index % 7
    features = np.asfortranarray(rng.normal(size=(input_dim, num_frames)).astype("float32"))
    alignment = rng.randint(0, output_dim, size=num_frames).astype("int32")
    return corpus_name(index), features, alignment, f" word{index} größe "


def selected(options):
    """The corpus indices that RASR would read."""
    order = list(range(int(options.get("num-seqs", 10))))
    if "corpus.partition" in options:
        order = order[int(options["corpus.select-partition"]) :: int(options["corpus.partition"])]
    if "corpus.segments.file" in options:
        with open(options["corpus.segments.file"], encoding="utf-8") as file:
            wanted = file.read().splitlines()
        by_name = {corpus_name(i): i for i in order}
        if "corpus.segment-order" in options:
            return [by_name[name] for name in wanted if name in by_name]
        order = [i for i in order if corpus_name(i) in set(wanted)]
    if options.get("shuffle") == "true":
        np.random.RandomState(int(options["seed"])).shuffle(order)
    return order


def feed(module, kind, name, features, alignment, orth):
    if kind == "feedInputAndTarget":
        module.feedInputAndTarget(
            features=features, weights=None, segmentName=name, orthography=orth,
            alignment=alignment, speaker_name="x", speaker_gender="y",
        )  # fmt: skip
    elif kind == "feedInputAndTargetAlignment":
        module.feedInputAndTargetAlignment(
            features=features, targetAlignment=alignment, segmentName=name
        )
    elif kind == "feedInputAndTargetSegmentOrth":
        module.feedInputAndTargetSegmentOrth(
            features=features, targetSegmentOrth=orth, segmentName=name
        )
    else:
        getattr(module, kind)(features=features, weights=None, segmentName=name)


def feed_control(control, kind, name, features, alignment, orth):
    frames = np.arange(len(alignment), dtype="int32")
    soft = (frames, alignment, np.full(len(alignment), 0.5, "float32"))
    control.process_segment(
        name=name, orthography=orth, features=features,
        alignment=None if kind == "control-soft" else alignment,
        soft_alignment=soft if kind == "control-soft" else None,
        speaker_name=f"speaker-{len(alignment) % 2}", future_argument=1,
    )  # fmt: skip


def c2p(options):
    config = dict(part.split(":", 1) for part in options["pymod-config"].split(","))
    return int(config["c2p_fd"])


def behave(kind, options, module):
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif kind == "exit":
        print("configuration error: no such corpus", flush=True)
        sys.exit(3)
    elif kind == "leave":
        sys.exit(0)
    elif kind == "hang":
        print("waiting for the license server", flush=True)
        time.sleep(1000)
    elif kind == "chatter":
        for _ in range(6):
            print("still loading", flush=True)
            time.sleep(0.4)
    elif kind == "raise":
        raise RuntimeError("the corpus is broken")
    elif kind == "half":
        os.write(c2p(options), b"\x40\x00\x00\x00\x80bc")
        sys.exit(0)
    elif kind == "garbage":
        os.write(c2p(options), b"Hello, this is a log line on the wrong descriptor\n")
        time.sleep(1000)
    elif kind == "evil":
        payload = b"\x80\x02cos\nsystem\n(S'touch evil'\ntR."
        os.write(c2p(options), len(payload).to_bytes(4, "little") + payload)
        time.sleep(1000)
    elif kind == "wrong-dim":
        from pickle import dumps

        payload = dumps(("data", ("bad", np.zeros((1, 3), "float32"), {})))
        os.write(c2p(options), len(payload).to_bytes(4, "little") + payload)
    elif kind == "short-alignment":
        module.feedInputAndTarget(
            features=np.zeros((int(options["input-dim"]), 4), "float32"),
            segmentName="short", alignment=np.zeros(3, "int32"),
        )  # fmt: skip
    elif kind == "grandchild":
        import subprocess

        sleeper = subprocess.Popen(["sleep", "1000"])
        with open(options["pid-file"], "w") as file:
            file.write(f"{os.getpid()} {sleeper.pid}")
    elif kind == "flood":
        print("x" * 3_000_000, flush=True)


def main(argv):
    pairs = [argument[2:].split("=", 1) for argument in argv if argument.startswith("--")]
    options = {key.removeprefix("*."): value for key, value in pairs}
    print("dummy trainer starts", flush=True)
    if options.get("at-seq") == "start":
        behave(options["behave"], options, None)
    path = options.get("pymod-path")
    if path:
        sys.path.append(path)
    module = import_module(options.get("use-module", options["pymod-name"]))
    order = selected(options)
    input_dim, output_dim = int(options["input-dim"]), int(options["output-dim"])
    kind = options.get("feed", "feedInputAndTarget")
    if options.get("python-segment-order") == "true":
        names = [corpus_name(i) for i in order]
        assert list(module.getSegmentList("corpus", names, config="", future_argument=1)) == names
    control = None
    config = options["pymod-config"]
    if kind.startswith("control"):
        control = module.init(name="Sprint.PythonControl", config=config, sprint_unit="Trainer")
        control.init_processing(input_dim=input_dim, output_dim=output_dim, future_argument=1)
    else:
        module.init(
            inputDim=input_dim, outputDim=output_dim, config=config,
            targetMode="target-generic", cudaEnabled=False,
        )  # fmt: skip
    for place, index in enumerate(order):
        if options.get("at-seq") == str(place):
            behave(options["behave"], options, module)
        name, features, alignment, orth = corpus_seq(index, input_dim, output_dim)
        if control:
            feed_control(control, kind, name, features, alignment, orth)
        else:
            feed(module, kind, name, features, alignment, orth)
    if control:
        control.exit(future_argument=1)
    else:
        module.exit()
    if options.get("at-seq") == "end":
        behave(options["behave"], options, module)
    print("dummy trainer ends", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
