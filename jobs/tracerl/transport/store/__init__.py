"""The record store process: a ring's server with lower tiers, and HTTP for readers on other nodes."""
