"""The configuration's sections: keys, defaults and descriptions."""
