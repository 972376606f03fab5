"""Walk through the statements of a module alone: through their expressions, it takes seconds."""

import ast

_WITH_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)


def statements(tree: ast.Module) -> list[ast.AST]:
    """Return a module and all statements in it."""
    scopes: list[ast.AST] = [tree]
    for scope in scopes:
        inside = ast.iter_child_nodes(scope)
        scopes += (each for each in inside if isinstance(each, _WITH_STATEMENTS))
    return scopes
