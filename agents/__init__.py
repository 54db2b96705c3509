"""Agents: messages in, typed result out. No wiring, no storage; the graphs do that."""
