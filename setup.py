"""The repository root is the package `seqshard`: `io/` is `seqshard.io`, and so on."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"', (ROOT / "__init__.py").read_text(), re.M).group(1)
FOLDERS = ["pipelines", "transforms", "io", "runners", "datasets"]
SUBPACKAGES = [name for name in find_packages(str(ROOT)) if name.split(".")[0] in FOLDERS]

setup(
    name="seqshard",
    version=VERSION,
    description="Speech corpora as sharded HDF datasets with a manifest, and readers for training",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir={"seqshard": "."},
    packages=["seqshard", *(f"seqshard.{name}" for name in SUBPACKAGES)],
    install_requires=[
        "numpy>=1.26",
        "h5py>=3.12.1",
        "pyarrow>=17",
        "xxhash>=3.4.1",
        "msgspec>=0.18.6",
        "fsspec>=2024.2",
        "tenacity>=8.2",
        "tqdm>=4.66",
    ],
    extras_require={
        "build": ["apache-beam>=2.70"],
        "dataflow": ["apache-beam[gcp]>=2.70", "gcsfs>=2024.2"],
        "report": ["matplotlib>=3.8"],
        "torch": ["torch>=2.2"],
        "s3": ["s3fs>=2024.2"],
        "gcs": ["gcsfs>=2024.2"],
        # Apart from "test", as the oldest s3fs goes with no moto of today.
        "test-stores": ["moto[server]>=5", "s3fs>=2024.2"],
        "test": [
            "pytest>=9",
            "hypothesis>=6.100",
            "returnn>=1.20260101",
            "ruff>=0.6",
            "setuptools>=70.1",
        ],
    },
    entry_points={"console_scripts": ["seqshard = seqshard.pipelines.cli:main"]},
)
