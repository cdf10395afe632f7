// Turns a memory fault of a kernel (guard pages around buffers and stacks) into an error of the launch.
#pragma once
void faults_catch();  // until faults_release, for the calling thread's launch
void faults_release();
