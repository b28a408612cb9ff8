"""Drafts beside plain decoding: requests served in plain steps or by plans drawn at random, with a drafter or none."""
