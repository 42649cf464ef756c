"""Configurations composed by Hydra: the only package that imports Hydra, and the files of ``conf/``."""
