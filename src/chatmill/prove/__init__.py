"""Proof of a build: what `chatmill verify` checks, shallow and deep, and the slow reference path it compares with."""
