from purestep.compiling.graph import Compiler, compile

__all__ = ["Compiler", "compile"]
