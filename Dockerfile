# safeload as a command that can read a checkpoint and nothing else:
#
#   docker build -t safeload .
#   docker run --rm --read-only --network none --cap-drop ALL --security-opt no-new-privileges \
#     -v "$PWD/checkpoint:/checkpoint:ro" -v "$PWD/trust:/trust:ro" \
#     safeload verify /checkpoint -m /trust/manifest.json --trust /trust/publisher.key.pub
#
# For more than a try, pin the image by digest: --build-arg IMAGE=python:3.13-slim@sha256:...
ARG IMAGE=python:3.13-slim

FROM ${IMAGE} AS build
# Which extras to install, such as [blake3] or [blake3,jax].
ARG EXTRAS=""
COPY . /source
# Bytecode is compiled here, as nothing can be written where it runs.
RUN python -m venv /safeload \
 && /safeload/bin/pip install --no-cache-dir --compile "/source${EXTRAS}" \
 && /safeload/bin/pip uninstall --yes pip

FROM ${IMAGE}
COPY --from=build /safeload /safeload
ENV PATH=/safeload/bin:$PATH PYTHONDONTWRITEBYTECODE=1
# A number, so that Kubernetes' runAsNonRoot can tell; it owns no file, and needs no home.
USER 65532:65532
WORKDIR /
ENTRYPOINT ["safeload"]
CMD ["--help"]
