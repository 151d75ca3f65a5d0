"""A checkpoint saver for LangGraph in the file that keeps our runs, and a LangGraph graph as a node (the
extra `langgraph`).

    from dagresume.langgraph import DagresumeSaver, run_graph

The library is loaded when one of them is used, not by importing this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dagresume.langgraph.nodes import GraphInterrupted, run_graph
    from dagresume.langgraph.saver import DagresumeSaver

__all__ = ["DagresumeSaver", "GraphInterrupted", "run_graph"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from dagresume.langgraph import nodes, saver
    except ImportError as error:
        told = "LangGraph's checkpoint library is not installed: pip install 'dagresume[langgraph]'"
        raise ImportError(told, name=error.name) from error
    return getattr(saver if name == "DagresumeSaver" else nodes, name)
