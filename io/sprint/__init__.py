"""Sprint/RASR cache archives: the container, its payloads, label files and the sources of a build.

The byte format is described in docs/sprint-format.md. Import from the modules; this file stays
empty so that each costs only what it needs.
"""
