#!/usr/bin/env bash
# Installs Flink, Beam's job server for it, Prism and Beam's boot program into a folder, where they
# are not there yet. What a registry does not have is said; the tests that need it are skipped.
#
# usage: install_clusters.sh PYTHON FOLDER
set -euo pipefail
python=$1 folder=$2
flink=1.20.3
beam=$("$python" -c 'from importlib.metadata import version; print(version("apache-beam"))')
mkdir -p "$folder/bin"

if [ ! -d "$folder/apache-flink-libraries-$flink" ]; then
    "$python" -m pip download --quiet --no-deps --dest "$folder" "apache-flink-libraries==$flink"
    tar -xzf "$folder/apache-flink-libraries-$flink.tar.gz" -C "$folder"
    rm "$folder/apache-flink-libraries-$flink.tar.gz"
fi

server=beam-runners-flink-${flink%.*}-job-server
if [ ! -f "$folder/$server-$beam.jar" ]; then
    mvn -q -B dependency:copy -Dartifact="org.apache.beam:$server:$beam" \
        -DoutputDirectory="$folder" > "$folder/mvn.log" 2>&1 ||
        echo "Maven has no $server $beam, so no job runs on Flink; see $folder/mvn.log"
fi

for name in go/cmd/prism python/container; do
    if [ ! -x "$folder/bin/$(basename "$name")" ]; then
        GOBIN="$folder/bin" go install "github.com/apache/beam/sdks/v2/$name@v$beam" \
            > "$folder/go.log" 2>&1 ||
            echo "Go cannot build $name $beam; see $folder/go.log"
    fi
done
