"""The job that Dataflow would get, translated by Beam's own runner without a request."""

from __future__ import annotations

import json
import re

import apache_beam as beam
import pytest
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.utils import proto_utils

from seqshard.io.config import Corpus, SourceFile
from seqshard.io.records import StreamSpec
from seqshard.pipelines.build import build
from seqshard.pipelines.options import parse_build_options
from seqshard.runners.dataflow import dataflow_options

pytest.importorskip("google.cloud.dataflow_v1beta3", reason="needs apache-beam[gcp]")

NUM_SOURCES = 5000
IMAGE = "europe-docker.pkg.dev/my-project/images/seqshard:1"
FLAGS = [
    "--project=my-project",
    "--region=europe-west4",
    "--temp_location=gs://bucket/temp",
    f"--sdk_container_image={IMAGE}",
]
STAGES = {
    "Corpus",
    "ListSources",
    "IndexSources",
    "SurveySources",
    "JoinStreams",
    "PlanShards",
    "PrepareOutput",
    "WriteShards",
    "AllRejected",
    "WriteManifest",
}
# One survey, one plan and lists of what is left out; never rows.
SIDE_INPUTS = {
    "SurveySources/Survey",
    "JoinStreams/Join",
    "PlanShards/PlanBins",
    "PlanShards/CutShards",
    "PrepareOutput/Prepare",
    "AllRejected",
}


def corpus():
    specs = (
        StreamSpec("data", "sprint-features"),
        StreamSpec("classes", "sprint-alignment", allophones="gs://b/a", state_tying="gs://b/t"),
    )
    sources = tuple(
        SourceFile(i, specs[i % 2], f"gs://bucket/corpora/2026/part.{i}.cache", f"part.{i}.cache")
        for i in range(NUM_SOURCES)
    )
    return Corpus(specs, sources, "error", None, 0, None, "digest")


@pytest.fixture(scope="module")
def job():
    options = parse_build_options(["--config=gs://b/c.toml", "--output=gs://b/out"], "build")
    pipeline = beam.Pipeline(options=dataflow_options([*FLAGS, "--dry_run=True"]))
    build(pipeline, corpus(), options, {})
    return pipeline.run().job


@pytest.fixture(scope="module")
def components(job):
    return job.proto_pipeline.components


@pytest.fixture(scope="module")
def description(job):
    """What the service is told beside the pipeline."""
    from apache_beam.runners.dataflow.internal import apiclient
    from google.protobuf import json_format

    environment = apiclient.Environment(
        packages=[],
        options=job.options,
        environment_version="8",
        proto_pipeline_staged_url="gs://bucket/temp/pipeline.pb",
        proto_pipeline=job.proto_pipeline,
    )
    return json.loads(json_format.MessageToJson(environment.proto._pb))


def leaves(components):
    return [t for t in components.transforms.values() if not t.subtransforms]


def test_the_description_has_the_presets(description):
    (pool,) = description["workerPools"]
    assert pool["machineType"] == "n2-standard-4"
    assert pool["diskSizeGb"] == 100
    assert pool["numThreadsPerWorker"] == 4
    assert pool["autoscalingSettings"]["algorithm"] == "AUTOSCALING_ALGORITHM_BASIC"
    assert pool["sdkHarnessContainerImages"][0]["containerImage"] == IMAGE
    assert "use_runner_v2" in description["experiments"]
    assert description["sdkPipelineOptions"]["options"]["save_main_session"] is False


def test_stages_have_the_names_of_the_design_and_no_name_twice(components):
    transforms = components.transforms
    names = [t.unique_name for name, t in transforms.items() if t.unique_name != name]
    assert len(names) == len(set(names))
    assert {name.partition("/")[0] for name in names} == STAGES
    own = [name for name in names if not name.startswith("Corpus/")]
    assert not [name for name in own if re.search(r"lambda|<|\d", name)]


def test_side_inputs_are_small(components):
    producers = {
        collection: t.unique_name for t in leaves(components) for collection in t.outputs.values()
    }
    used = set()
    for transform in leaves(components):
        if transform.spec.urn == "beam:transform:pardo:v1":
            payload = proto_utils.parse_Bytes(
                transform.spec.payload, beam_runner_api_pb2.ParDoPayload
            )
            used |= {producers[transform.inputs[name]] for name in payload.side_inputs}
    shortened = {name.removesuffix("/ParDo(Stage)") for name in used}
    assert shortened
    assert shortened <= SIDE_INPUTS


def test_keys_and_rows_have_coders_that_need_no_pickling(components):
    coders = components.coders

    def describe(name):
        coder = coders[name]
        inner = ", ".join(map(describe, coder.component_coder_ids))
        own = re.sub(r"^ref_Coder_|_\d+$", "", name)
        return f"{own}({inner})" if inner else own

    grouped = {
        t.unique_name: describe(components.pcollections[collection].coder_id)
        for t in leaves(components)
        if t.spec.urn == "beam:transform:group_by_key:v1"
        for collection in t.inputs.values()
    }
    assert len(grouped) == 7, grouped
    assert all(coder.startswith("TupleCoder(VarIntCoder, ") for coder in grouped.values()), grouped
    for name in ("JoinStreams/ByBucket", "WriteShards/ByShard"):
        assert grouped[name] == "TupleCoder(VarIntCoder, RowsCoder)"


def test_thousands_of_files_make_a_small_graph(job, description):
    # The service takes 10 MB.
    assert job.proto_pipeline.ByteSize() < 1_000_000
    assert len(json.dumps(description)) < 100_000
