"""What the rollout recorded: site table, packing, frames, and pairing by (trajectory, token, site)."""
