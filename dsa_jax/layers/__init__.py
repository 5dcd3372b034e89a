"""The parts of a decoder, each an NNX module whose forward is a pure function of its arguments."""
