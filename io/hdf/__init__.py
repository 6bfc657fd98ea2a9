"""HDF files in RETURNN's layout: as sources, and as the shards of a dataset."""
