from tests.convert.conftest import teacher, text

__all__ = ["teacher", "text"]
