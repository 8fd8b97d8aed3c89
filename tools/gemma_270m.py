NAME = "gemma-3-270m"
DTYPE = "float32"
GROUPS = ("full", "window-511")
def fetch(out): raise NotImplementedError
