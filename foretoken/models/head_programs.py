"""The programs of a draft head.

They join token and hidden state, run the layers, and compute the output.
"""

from __future__ import annotations

from foretoken_kernels.cpu import decoder as kernel
from foretoken_kernels.cpu.linear import ADD

from foretoken.models.draft_config import HeadConfig
from foretoken.models.draft_weights import HeadWeights, ModuleWeights
from foretoken.models.program import Attention, Columns, LayerShape, Program

# MiMo is trained with zeros for the embedding in the pair of the target's first position, whose KV
# slot is 1.
_ZEROED_POSITION = 1


class HeadPrograms:
    """Builds the programs of one draft head.

    Args:
        hidden_width: elements of the target's hidden states that one row is fed.

    Attributes:
        output: the buffer with the hidden state that the next recurrent pass is fed.
    """

    def __init__(self, config: HeadConfig, weights: HeadWeights, hidden_width: int) -> None:
        self._config, self._weights = config, weights
        self._family, self._size, self._hidden_width = config.family, config.body.hidden_size, hidden_width
        is_normed = config.family == "mtp" or config.norm_output
        self.output = Columns(kernel.OUTPUT if is_normed else kernel.HIDDEN, self._size)

    def whole(self, depth: int, *, from_target: bool) -> Program:
        """Return the program of module ``depth``: KV entries, hidden states and logits.

        ``from_target``: the rows are fed the target's hidden states, not the head's own.
        """
        program, module = Program(), self._weights.modules[depth]
        self._join(program, module, from_target=from_target)
        self._layers(program, module, depth * len(module.layers))
        self._finish(program, module)
        return program

    def kv_only(self) -> Program:
        """Return the program that writes the first module's KV entries, and nothing else."""
        program, module = Program(), self._weights.modules[0]
        self._join(program, module, from_target=True)
        self._layers(program, module, 0, kv_only=True)
        return program

    def _join(self, program: Program, module: ModuleWeights, *, from_target: bool) -> None:
        """Join token and hidden state to the input of the first layer."""
        if self._family == "eagle":
            self._join_eagle(program, module)
        elif self._family == "eagle3":
            self._join_eagle3(program, module, from_target)
        else:
            self._join_mtp(program, module)

    def _embed(self, program: Program, out: Columns) -> None:
        zeroed = _ZEROED_POSITION if self._config.layout == "mimo" else -1
        program.embed(self._weights.embedding, self._weights.embedding_is_packed, out, zeroed)

    def _joint(self, program: Program, module: ModuleWeights, x: Columns) -> None:
        """Set HIDDEN to the joint matrix times ``x``, plus its bias if it has one."""
        hidden = Columns(kernel.HIDDEN, self._size)
        if module.joint_bias.numel():
            program.fill(module.joint_bias, hidden)
            program.linear(x, module.joint, hidden, ADD)
        else:
            program.linear(x, module.joint, hidden)

    def _join_eagle(self, program: Program, module: ModuleWeights) -> None:
        size = self._size
        self._embed(program, Columns(kernel.EMBEDDED, size, 0, 2 * size))
        program.copy(Columns(kernel.GIVEN, size), Columns(kernel.EMBEDDED, size, size, 2 * size))
        self._joint(program, module, Columns(kernel.EMBEDDED, 2 * size))

    def _join_eagle3(self, program: Program, module: ModuleWeights, from_target: bool) -> None:
        """Put the normed embedding and the normed hidden state side by side in NORMED.

        The residual goes to HIDDEN.
        """
        size, hidden = self._size, Columns(kernel.HIDDEN, self._size)
        embedded = Columns(kernel.EMBEDDED, size)
        self._embed(program, embedded)
        program.norm(embedded, module.embedding_norm, Columns(kernel.NORMED, size, 0, 2 * size))
        if from_target:
            self._normed_hidden(program, module)
            self._joint(program, module, Columns(kernel.EMBEDDED, self._hidden_width))
        else:
            program.copy(Columns(kernel.GIVEN, size), hidden)
        normed_hidden = Columns(kernel.NORMED, size, size, 2 * size)
        program.norm(hidden, module.hidden_norm, normed_hidden)
        if self._config.norm_before_residual:
            program.copy(normed_hidden, hidden)

    def _normed_hidden(self, program: Program, module: ModuleWeights) -> None:
        """Copy the target's hidden states to EMBEDDED, through their norms if there are any."""
        total = self._hidden_width
        norms = module.hidden_norms
        if not norms:
            program.copy(Columns(kernel.GIVEN, total), Columns(kernel.EMBEDDED, total))
        width = total // max(len(norms), 1)
        for i, norm in enumerate(norms):
            given = Columns(kernel.GIVEN, width, i * width, total)
            program.norm(given, norm, Columns(kernel.EMBEDDED, width, i * width, total))

    def _join_mtp(self, program: Program, module: ModuleWeights) -> None:
        size, embedded = self._size, Columns(kernel.EMBEDDED, self._size)
        first, second = Columns(kernel.NORMED, size, 0, 2 * size), Columns(kernel.NORMED, size, size, 2 * size)
        token, state = (second, first) if self._config.layout == "mimo" else (first, second)
        self._embed(program, embedded)
        program.norm(embedded, module.embedding_norm, token)
        program.norm(Columns(kernel.GIVEN, size), module.hidden_norm, state)
        self._joint(program, module, Columns(kernel.NORMED, 2 * size))

    def _layers(self, program: Program, module: ModuleWeights, first_plane: int, *, kv_only: bool = False) -> None:
        body, size = self._config.body, self._size
        hidden, normed = Columns(kernel.HIDDEN, size), Columns(kernel.NORMED, size)
        for index, layer in enumerate(module.layers):
            is_joined = index == 0 and self._family == "eagle3"
            if layer.input_norm.numel():
                program.norm(hidden, layer.input_norm, normed)
            elif not is_joined:
                program.copy(hidden, normed)
            input_size = 2 * size if is_joined else size
            shape = LayerShape(
                size, body.intermediate_size, body.num_heads, body.num_kv_heads, body.head_dim, input_size
            )
            add = program.kv_entries if kv_only else program.layer
            add(shape, Attention(first_plane + index, layer))

    def _finish(self, program: Program, module: ModuleWeights) -> None:
        hidden, normed = Columns(kernel.HIDDEN, self._size), Columns(kernel.NORMED, self._size)
        if self.output.buffer == kernel.OUTPUT:
            program.norm(hidden, module.final_norm, self.output)
            program.copy(self.output, normed, kernel.GATHERED)
        elif module.final_norm.numel():
            program.norm(hidden, module.final_norm, normed, kernel.GATHERED)
        else:
            program.copy(hidden, normed, kernel.GATHERED)
        program.logits(self._weights.head, self._size, self._weights.draft_vocab_size)
