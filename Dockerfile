# sage-fast with the C++ operators, on PyTorch's image: `docker build -t sage-fast .`, docs/how-to/install.md.
# TORCH is any tag of docker.io/pytorch/pytorch with torch 2.11 or newer and a compiler (devel).
ARG TORCH=2.11.0-cuda13.0-cudnn9-devel
FROM docker.io/pytorch/pytorch:${TORCH}

SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
WORKDIR /opt/sage-fast
COPY . .

# The README's, in the environment that the image has, with the versions that are tested. torch and triton are its own.
ARG PIP_CONSTRAINT=/opt/sage-fast/constraints.txt
RUN sed -i -E '/^(torch|triton|setuptools)==/d' constraints.txt
RUN pip install torch numpy 'setuptools>=77' ninja
RUN pip install --no-build-isolation '.[deepspeed]'

# Nothing runs as root. `docker run --user "$(id -u):$(id -g)"` writes the runs of the mounted folder as yours.
ENV HOME=/tmp USER=sage
USER 1000:1000

# Configuration, prompts, rewards and runs are those of the folder that is mounted here.
WORKDIR /work
CMD ["sage-fast", "--help"]
