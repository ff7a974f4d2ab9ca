"""Operations of the forward pass. `<op>.py` is public: it checks arguments and runs the named
implementation. `<op>_ref.py` is the specification in torch."""
