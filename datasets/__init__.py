"""Training-time readers. Light: no Beam, no torch, no RETURNN."""
