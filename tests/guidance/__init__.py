"""Tests of the guidance split and of splitting a list of prompts."""
