"""Synthetic models with a known output and a chosen acceptance, for benchmarks and tests.

models      a target of any shape that continues a known text, and drafts for it
acceptance  how often drafts are right: at even distances, or as published drafters are on texts of a domain
shapes      configs of well-known models
names       names of all of these, for parsers
"""
