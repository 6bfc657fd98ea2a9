"""File formats and storage. Nothing in here imports Beam."""
