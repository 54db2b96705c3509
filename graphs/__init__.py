"""LangGraph wiring: states, nodes, edges, checkpointers. What the nodes do is in `sesa.agents` and `sesa`."""
