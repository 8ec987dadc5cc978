"""Adapters from the loop to the engines that train and generate."""
