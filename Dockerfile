# Workers of a build on Dataflow, or on any runner that starts containers:
#
#   docker build --tag IMAGE .
#   docker push IMAGE
#   python -m pipelines.build --runner=DataflowRunner --sdk_container_image=IMAGE ...
#
# Python and Beam have to be those of the machine that starts the build.
ARG PYTHON_VERSION=3.11
FROM apache/beam_python${PYTHON_VERSION}_sdk:2.77.0

COPY runners/worker-requirements.txt /tmp/seqshard/
RUN pip install --no-cache-dir --requirement /tmp/seqshard/worker-requirements.txt

# All that it needs is pinned above: a test compares the pins with setup.py.
COPY . /tmp/seqshard/source
RUN pip install --no-cache-dir --no-deps /tmp/seqshard/source \
    && rm -rf /tmp/seqshard \
    && python -c "import seqshard.pipelines.build, seqshard.transforms.write_shards"
